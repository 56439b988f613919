"""The problem that a ticket asks for: of a mixture, in an order, by a curriculum."""
