"""What one request may ask of a model, however little else there is to do."""

from __future__ import annotations

from nerite.scheduling.tokens.headroom import Headroom
from nerite.scheduling.tokens.policy import ModelLimits
from nerite.scheduling.tokens.refusal import Fault, Limit, Refusal
from nerite.scheduling.tokens.ticket import Ticket


def size_refusal(ticket: Ticket, limits: ModelLimits, headroom: Headroom, of: str) -> Refusal | None:
    """Return why a request is larger than it may be; if it may, say in it how many tokens it can have at the most."""
    size = ticket.least
    if limits.max_input and size > limits.max_input:
        limit = Limit.MAX_INPUT_TOKENS if limits.tokens else Limit.MAX_BYTES
        return Refusal(
            limit=limit,
            fault=Fault.SIZE,
            of=of,
            value=limits.max_input,
            use=size,
            text="the prompt is too long" if limits.tokens else "the request is too large",
        )
    if not limits.tokens:
        return None
    if limits.max_output and ticket.most > limits.max_output:
        return Refusal(
            limit=Limit.MAX_OUTPUT_TOKENS,
            fault=Fault.CLIENT,
            of=of,
            value=limits.max_output,
            use=ticket.most,
            text="more output tokens are asked for than there may be; ask for fewer",
        )
    window = limits.context_window
    if window and (size >= window or size + ticket.most > window):
        return Refusal(
            limit=Limit.CONTEXT_WINDOW,
            fault=Fault.SIZE if size >= window else Fault.CLIENT,
            of=of,
            value=window,
            use=size + max(ticket.most, 1),
            text=f"a prompt of {size} tokens and {max(ticket.most, 1)} of output are longer than the context",
        )
    if headroom.block_size and headroom.blocks(size + 1) > headroom.total_blocks:
        return Refusal(
            limit=Limit.KV_BLOCKS,
            fault=Fault.SIZE,
            of=of,
            value=headroom.total_blocks,
            use=headroom.blocks(size + 1),
            text="the prompt is longer than all memory of the engine holds",
        )
    if not ticket.most:
        left = max(window - ticket.input_size, 1) if window else 0
        room = [bound for bound in (limits.max_output, left) if bound]
        ticket.most = min(room) if room else max(headroom.total_blocks * headroom.block_size - ticket.input_size, 0)
    return None
