"""Every public failure that we know of, and eight hostile inputs, each as one test named after it: ``pytest -m cases``.

``test_aNN_...`` drives the whole library, or the part that the case is about, through the case's own scenario and those
around it, and asserts what would have been right. What else of the kind was tried stands in its docstring. Tests
elsewhere prove the parts; here a reader finds the answer to "does it have the bug that ... had?".
"""
