"""Training that meets rarely: ranks update on their own, and average what they changed.

``schedule`` says when which fragment meets, ``fragments`` which parameters it holds, ``meeting``
what happens there; ``training`` is the handle that a session drives, ``engine`` the engine of its
gradients, ``model`` the verbs of a model whose ranks differ.
"""
