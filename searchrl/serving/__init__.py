# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""HTTP servers: a search engine at /retrieve, a policy with OpenAI's API."""
