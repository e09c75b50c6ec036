# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Search engines: from a corpus to a SearchFn, from queries to passages."""
