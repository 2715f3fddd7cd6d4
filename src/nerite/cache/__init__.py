"""The response cache: answers repeated requests without the model. In memory (``local``) or in Redis (``redis``)."""
