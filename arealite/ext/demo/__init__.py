"""The tiny model and the task of `arealite quickstart`, made on this machine."""
