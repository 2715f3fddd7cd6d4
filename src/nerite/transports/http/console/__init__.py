"""The console: a page that shows what the server does, in a browser."""
