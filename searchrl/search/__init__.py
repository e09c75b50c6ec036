# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Engines: a corpus in, a SearchFn out, which maps queries to passages."""
