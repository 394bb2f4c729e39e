"""Media that hold chunks by key: one module a medium, ``memory``, ``cpu`` and ``fs``.

``parse`` makes one from configuration, others' by entry point too. The names with an underscore are what ``cpu`` is
made of, and ``_fs`` what ``fs`` is.
"""
