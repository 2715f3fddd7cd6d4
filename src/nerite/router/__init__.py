"""The router: a process in front of pools of servers, which passes requests on and knows no models of its own."""
