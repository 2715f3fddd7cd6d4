"""Which types the functions for models take for each parameter, and which they refuse."""

from __future__ import annotations

from binding_arguments import OF_OUR_OWN, PROBES
from conformance.exchanges.calls import told
from conformance.exchanges.scenes import ARGUMENTS

SCENE = ARGUMENTS

EXCHANGES = {
    **{name: told(parameter.program) for name, parameter in PROBES.items()},
    **{f"our own: {name}": told(parameter.program) for name, parameter in OF_OUR_OWN.items()},
}
