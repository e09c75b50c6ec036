# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Search engines: each makes a SearchFn (queries to passages) from a corpus."""
