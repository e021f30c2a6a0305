"""A chunk group: the parameters of one compute dtype with all that keeps and updates them."""
