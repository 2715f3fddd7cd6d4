"""Command line of the server: parses flags into options and dispatches to the commands. Contains no server logic."""
