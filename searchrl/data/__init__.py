# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Data: questions, data sets with their corpora, pairs for an encoder."""
