"""Mutation tests: which small changes of the imperative code do the container-free tests notice?"""
