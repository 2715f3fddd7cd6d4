"""What has to be said before the tests of this shelf are imported."""

import pytest

# The exercises are no test modules, and have assertions that should tell what they compared all the same.
pytest.register_assert_rewrite("conformance.stock", "conformance.exercises")
