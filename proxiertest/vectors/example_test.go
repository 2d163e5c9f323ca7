package vectors_test

import (
	"encoding/json"
	"fmt"
	"log"
	"reflect"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/proxiertest/vectors"
)

// mine stands for a program's own choice of endpoints.
func mine(vectors.Node, *v1.Service, []*discovery.EndpointSlice) []vectors.Want { return nil }

// A program compares its own choice of endpoints with the vectors, in a test.
func ExampleLoad() {
	nodes, all, err := vectors.Load()
	if err != nil {
		log.Fatal(err)
	}
	wrong := 0
	for _, v := range all {
		var service v1.Service
		if err := json.Unmarshal(v.Service, &service); err != nil {
			log.Fatal(err)
		}
		var slices []*discovery.EndpointSlice
		for _, text := range v.EndpointSlices {
			var slice discovery.EndpointSlice
			if err := json.Unmarshal(text, &slice); err != nil {
				log.Fatal(err)
			}
			slices = append(slices, &slice)
		}
		var got []vectors.Want
		for _, node := range nodes {
			got = append(got, mine(node, &service, slices)...)
		}
		if !reflect.DeepEqual(got, v.Want) {
			wrong++ // log v.Name, got and v.Want
		}
	}
	fmt.Println(wrong, "of", len(all), "are wrong")
	// Output: 156 of 156 are wrong
}
