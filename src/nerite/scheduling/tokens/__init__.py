"""Admission on token economics: who is let in to a model, when, and who is refused with which figure. Pure deciders.

``Gate`` stands in front of one model and asks the others; ``Accounts`` are shared by the gates of all models. Times are
nanoseconds on whatever clock the caller uses throughout.
"""
