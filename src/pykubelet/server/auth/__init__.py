"""Authentication and authorization of API requests.

- `request_auth.py`: authenticator and authorizer, from the configuration.
- `identity.py`: users, and the attributes of a request.
- `reviews.py`: TokenReviews and SubjectAccessReviews with their cache.
"""
