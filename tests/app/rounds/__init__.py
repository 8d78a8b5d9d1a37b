"""Tests of training in rounds."""
