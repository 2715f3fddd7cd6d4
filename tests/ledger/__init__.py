"""The ledger of the contract: for each thing that Triton's users rely on, the test that shows what it changes.

A test is named by its file and function, or, where Nerite and Triton are asked the same, by topic and exchange of
``tests/conformance/exchanges``. What has no effect is listed in the product: fields of configurations in
``nerite.config.validate``, flags in ``nerite.cli.flags`` (``no_effect``). ``tests/unit/test_ledger.py`` holds all
of this complete, and ``tools/build_contract.py`` makes docs/contract.md from it.
"""
