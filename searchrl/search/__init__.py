# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Search engines: a corpus in, a SearchFn from queries to passages out."""
