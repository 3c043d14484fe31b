"""One headless Chromium a process: its pages as text, and what agents may do to them."""
