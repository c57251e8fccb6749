"""cAdvisor's REST API, for the port of the node page: `routes.cadvisor_api_routes`."""
