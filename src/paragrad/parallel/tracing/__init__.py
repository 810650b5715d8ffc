"""Where a model can be divided into consecutive stages, and what crosses between them."""
