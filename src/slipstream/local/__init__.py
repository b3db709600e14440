"""Training that meets rarely: ranks update on their own, and average what they changed.

``fragments`` says which parameters a fragment holds and when it meets, ``meeting`` what happens
there; ``training`` is the handle that a session drives, ``engine`` the engine of its gradients,
``model`` the verbs of a model whose ranks differ.
"""
