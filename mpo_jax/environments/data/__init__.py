"""The documents and questions of the search environment, and the scripts that built them."""
