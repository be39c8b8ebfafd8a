"""What all tests share: hypothesis draws the same examples on every machine and does not time them."""

from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("house")
