# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data: questions, data sets with their corpora, and pairs for an encoder."""
