# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""ZeroSearch, arXiv:2505.04588: a policy learns with a simulated search engine.

`simulated.py` is the engine. A writer, such as a language model, writes the
documents that it finds. Jobs collect data to tune a writer, compare it with a
real engine, and compute the cost of a run's searches.
"""
