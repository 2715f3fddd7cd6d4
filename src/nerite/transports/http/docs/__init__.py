"""What a server says of itself to those who want to use it: an OpenAPI document, and a page to look at."""
