"""What `lazy_actors.py` needs: actors who read nothing, judges without a model."""
