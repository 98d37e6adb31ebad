"""Other packages' attention functions on pyfa's: the same names, signatures, defaults and returns.

``fa2``, ``fa3``, ``fa4``: flash-attention 2, 3 and 4. Import what you need; ``import pyfa`` loads
none of it.
"""
