// Package namespace runs functions in other network namespaces.
package namespace
