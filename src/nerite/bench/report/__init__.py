"""Outcomes as documents: for programs, for spreadsheets, for people."""
