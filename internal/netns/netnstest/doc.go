// Package netnstest makes network namespaces for tests, and cleans up after them.
package netnstest
