package debughttp_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/node/debughttp"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// A program serves the page to its operators on a loopback address.
func ExampleHandler() {
	engines := map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: &proxiertest.RecordingEngine{}}
	p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, proxier.Deps{}, engines)
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("/debug/serviceplane/", http.StripPrefix("/debug/serviceplane", debughttp.Handler(p)))

	server := httptest.NewServer(mux) // at 127.0.0.1
	defer server.Close()
	response, err := server.Client().Get(server.URL + "/debug/serviceplane/service?namespace=shop&name=web")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	fmt.Println(response.StatusCode, strings.TrimSpace(string(answer)), err)
	// Output: 404 {"error":"no programmed Service has this name: shop/web"} <nil>
}
