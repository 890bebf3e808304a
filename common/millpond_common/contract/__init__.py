"""Names and shapes that cross a process boundary; each has a golden test under tests/contract.

Pure: data and functions of data. A change here is a change other processes or users can see,
so it is made on purpose, with the golden file, and it appears in the changelog.
"""
