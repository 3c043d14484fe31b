"""One headless Chromium per worker: descriptions of its pages as text, and actions on them."""
