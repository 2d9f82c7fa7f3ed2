"""Programs nobody here wrote, run with and without `anynan`: ``make wild``.

A suite (``suites/``) names cases and runs one of them; ``running.py`` gives each a process of its
own; ``known.py`` lists the differences that are known, each with its reason; ``proof.py`` makes
``docs/proof.md`` of the rows.
"""
