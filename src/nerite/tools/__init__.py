"""Commands beside the server: they look at repositories, machines and running servers, or put a load on them."""
