"""Who hears of statistics."""


class StatLoggerBase:
    pass
