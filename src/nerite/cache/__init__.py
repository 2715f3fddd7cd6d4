"""The response cache: what was answered before is answered again, without the model. ``local`` or ``redis``."""
