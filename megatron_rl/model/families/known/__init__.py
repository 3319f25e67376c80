"""The supported families, a file for each maker, with its entries in `FAMILIES`."""
