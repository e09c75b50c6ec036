# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Tools beside the search: documents, a calculator, Python, MCP servers."""
