"""Other packages' attention functions on pyfa's: the same names, signatures, defaults and returns.

``fa2``: flash-attention 2. Import what you need; ``import pyfa`` loads none of it.
"""
