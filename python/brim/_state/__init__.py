"""State of a program: what a call reaches, and how it is saved and put back.

`Undoing` in the C++ core puts things back: every step, past errors and Ctrl-C. The modules here
know what there is to put back.
"""
