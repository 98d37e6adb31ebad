"""Other packages' attention functions on pyfa, with the same names, signatures, defaults and return
values.

``fa2``, ``fa3``, ``fa4``: flash-attention 2, 3 and 4. ``flash_mla``: FlashMLA. ``import pyfa``
loads none of them.
"""
