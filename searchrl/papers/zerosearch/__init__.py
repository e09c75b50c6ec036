# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ZeroSearch, arXiv:2505.04588: a policy learns on documents that are written.

`simulated.py` is the engine, and the writers of its documents are beside it.
Jobs collect data to tune a writer on, compare it with a real engine, and
compute the cost of a run's searches.
"""
