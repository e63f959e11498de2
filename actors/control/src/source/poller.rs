//! A source as it is configured, ready to be asked.

use super::cloud_controller::CloudController;
use super::config::{self, Source};
use super::directory::Directory;
use super::http::{Http, Settings};
use super::neutron::Neutron;
use super::session::{Credential, Keystone, Uaa, secret_file};
use super::{Failed, Polled};

/// Connected when it is first asked: files with certificates may come later, and a source that cannot be used spoils no other.
pub struct Poller {
    config: Source,
    open: Option<Open>,
}

enum Open {
    CloudController(Box<CloudController>, Http),
    Neutron(Box<Neutron>, Http),
    Directory(Directory),
}

impl Poller {
    pub fn new(config: Source) -> Self {
        Self { config, open: None }
    }

    pub async fn poll(&mut self, full: bool, marker: Option<&str>) -> Result<Polled, Failed> {
        let open = match &mut self.open {
            Some(open) => open,
            none => none.insert(open(&self.config).map_err(Failed::new)?),
        };
        match open {
            Open::CloudController(source, http) => source.poll(http, full, marker).await,
            Open::Neutron(source, http) => source.poll(http, full, marker).await,
            Open::Directory(source) => source.poll(full, marker).await,
        }
    }
}

fn open(config: &Source) -> Result<Open, String> {
    Ok(match config {
        Source::CloudController(config) => {
            let http = Http::new(&Settings {
                api: &config.url,
                internal: &config.internal_url,
                login: &config.uaa_url,
                ca_file: config.ca_file.as_deref(),
                identity: config.client_cert_file.as_deref().zip(config.client_key_file.as_deref()),
                timeout: config.timeout,
            })?;
            let uaa = Uaa { client_id: config.client_id.clone(), secret: secret_file(config.client_secret_file.clone()) };
            Open::CloudController(Box::new(CloudController::new(config.id.clone(), config.page_size, uaa)), http)
        }
        Source::Neutron(config) => {
            let http = Http::new(&Settings {
                api: &config.url,
                internal: &config.url,
                login: config.auth_url.trim_end_matches('/').trim_end_matches("/v3"),
                ca_file: config.ca_file.as_deref(),
                identity: config.client_cert_file.as_deref().zip(config.client_key_file.as_deref()),
                timeout: config.timeout,
            })?;
            let keystone = Keystone { credential: credential(config)? };
            Open::Neutron(Box::new(Neutron::new(config.id.clone(), config.page_size, keystone)), http)
        }
        Source::Directory(config) => Open::Directory(Directory::new(config.id.clone(), config.path.clone())),
    })
}

fn credential(config: &config::Neutron) -> Result<Credential, String> {
    let application = config.application_credential_id.as_ref().zip(config.application_credential_secret_file.as_ref());
    if let Some((id, secret)) = application {
        return Ok(Credential::Application { id: id.clone(), secret: secret_file(secret.clone()) });
    }
    match (&config.username, &config.password_file, &config.project) {
        (Some(username), Some(password), Some(project)) => Ok(Credential::Password {
            username: username.clone(),
            user_domain: config.user_domain.clone(),
            password: secret_file(password.clone()),
            project: project.clone(),
            project_domain: config.project_domain.clone(),
        }),
        _ => Err("no credential: give application_credential_id, or username, password_file and project".to_owned()),
    }
}
