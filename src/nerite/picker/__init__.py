"""An endpoint picker: gateways such as Envoy ask it over ext_proc where requests go, and carry the data."""
