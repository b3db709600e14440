"""A model over several ranks: layers split over tensor ranks, a chain of layers cut into stages."""
