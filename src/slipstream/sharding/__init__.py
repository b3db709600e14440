"""The sharded transport's side of the update: each rank steps its share of every parameter.

``gradients`` delivers this rank's shares of the averages; ``update`` steps them with the user's
optimizer, and ``gather`` brings the other ranks' shares under the next forward.
"""
