"""What a report says about people: how close a model is to them, and what it remembers of them."""
